from tests.docs.small import MyModel, my_loader

model, train_loader = MyModel(), my_loader()
